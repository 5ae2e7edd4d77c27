"""The architecture as the code is: ten wings, imports that only run downwards, short functions."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwise
import headwise_vllm

PACKAGE = Path(headwise.__file__).parent

WINGS = {
    "errors": (),
    "base": (),
    "models": ("specs", "families", "checkpoints"),
    "costs": ("formulas", "prediction"),
    "runtime": ("kernels", "quantization", "attention", "caches", "hf", "parallel"),
    "measure": ("timing", "texts", "points", "evaluation", "profiling"),
    "serving": ("programs", "exports", "engines", "http", "serve"),
    "conversion": (
        *("solvers", "codes", "methods", "plan", "storage", "calibration", "budget", "output", ""),
        *("preparation", "healing", "frontiers", "migrate"),
    ),
    "decide": ("advice", "report"),
    "study": ("guide", "counting", "bench", "audit"),
    "hf": (),
    "cli": (),
    "__main__": (),
}
"""The wings in order, and the folders and files of each, in order too: each imports only from those before it.

``""`` stands for the files that lie in a wing directly; wings without a list have no order inside."""

LONGEST_BODY, MOST_PARAMETERS = 60, 8

EXEMPT = {
    # Its parameters are those of torch's scaled_dot_product_attention.
    "runtime/kernels/attend.py": "SDPA's signature",
    "runtime/kernels/gpu/kernels.py": "a GPU kernel",
    "runtime/kernels/gpu/codes.py": "a kernel's call",
    "runtime/kernels/gpu/trellis.py": "a kernel's call",
    "runtime/kernels/gpu/trellis_kernels.py": "a GPU kernel",
    "runtime/kernels/native/calls.py": "a kernel's call",
    "costs/formulas/layer.py:forward_flops": "a formula: each keyword is one of its letters, or which terms count",
    "costs/formulas/reports.py:complexity": "the letters of forward_flops, and which layer of a model",
    "study/bench/decode.py:bench_decode": "a grid: each keyword is one of its axes",
}
"""Files and functions that may take more parameters, and why; layers' constructors may too, of config fields."""

FORWARDED = {
    "runtime/attention/base.py:build": "to a mechanism that is found by its name",
    "runtime/attention/grouped.py:__init__": "to the base class, whose keywords are config fields",
    "models/checkpoints/tokenizer.py:decode": "to a tokenizer of transformers",
    "models/checkpoints/tokenizer.py:tokenize": "to a tokenizer of transformers",
    "models/checkpoints/checkpoint.py:run_identity": "options by name, whatever they are: a digest is made of them",
    "cli/printable.py:write": "called as Python's showwarning",
    "cli/options.py:run": "a command's arguments, as typer names them by the signature",
    "cli/printable.py:render_str": "to a method of rich",
    "study/counting/module.py:_dot_product_flops": "called by torch's counter",
    "study/counting/module.py:_grouped_flops": "called by torch's counter",
    "study/counting/module.py:_matrix_vector_flops": "called by torch's counter",
    "study/counting/module.py:count": "to the module that is counted",
    "study/counting/module.py:flops": "called by torch's counter",
    "study/counting/layer_comparison.py:peer_counts": "to the module that is counted",
    "measure/evaluation/results.py:__init_subclass__": "to Python's own",
    "runtime/hf/attention.py:forward": "called by transformers",
    "runtime/hf/step.py:forward": "called by transformers",
    "runtime/caches/cache.py:update": "called by transformers",
    "runtime/caches/layers.py:update": "called by transformers",
    "runtime/hf/codes.py:save": "a method of transformers in its place",
    "runtime/hf/codes.py:upload": "a method of transformers in its place",
    "runtime/hf/models.py:refuse_continuous_batching": "a method of transformers in its place",
    "serving/http.py:load_model_and_processor": "called by transformers",
    "serving/http.py:_build_generation_config": "called by transformers",
    "serving/http.py:generate_streaming": "called by transformers",
    "serving/http.py:generate": "to a model of transformers",
    "runtime/hf/interface.py:attention_forward": "called by transformers",
    "runtime/hf/interface.py:attention_mask": "called by transformers",
    "runtime/hf/layerwise.py:attended": "a method of transformers in its place",
    "runtime/hf/layerwise.py:projected": "a method of transformers in its place",
    "runtime/hf/layerwise.py:record": "a method of transformers in its place",
    "runtime/hf/models.py:prepare_prompt": "a method of transformers in its place",
    "base/options/declare.py:__init_subclass__": "to Python's own",
    "base/options/declare.py:of": "to the options class's own constructor",
    "base/options/declare.py:call": "checked against the options class, and shown in the signature",
    "models/specs/base.py:__init_subclass__": "to Python's own",
    "measure/texts/sources.py:_dataset_rows": "to a function of datasets",
    "base/pages.py:web_page": "to a template",
    "conversion/output/card.py:rendered_card": "to a template",
    "base/type_checks.py:checked": "to the decorated function",
}
"""Functions that take any keywords, and to whom they hand them; all others name theirs."""


def modules() -> dict[str, Path]:
    """Every module of the package by its name without ``headwise.``; the package itself is ``""``."""
    by_name = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


MODULES = modules()


def imported(name: str) -> Iterator[str]:
    """The modules that a module imports when it is imported itself, or when its functions run."""
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "headwise":
            base = (node.module or "").removeprefix("headwise").removeprefix(".")
            for alias in node.names:
                below = f"{base}.{alias.name}".lstrip(".")
                yield below if below in MODULES else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "headwise":
                    yield alias.name.removeprefix("headwise").removeprefix(".")


def place(name: str) -> tuple[int, int]:
    """The place of a module in the order of wings, and of what is in its wing."""
    wing, _, rest = name.partition(".")
    folders = WINGS[wing]
    folder = rest.partition(".")[0]
    return [*WINGS].index(wing), folders.index(folder if folder in folders else "") if folders else 0


def test_every_wing_has_its_place() -> None:
    assert {name.partition(".")[0] for name in MODULES if name} == WINGS.keys()
    for wing, folders in WINGS.items():
        if folders:
            inside = {name.split(".")[1] for name in MODULES if name.startswith(f"{wing}.")}
            assert inside >= {*folders} - {""}
            assert inside == {*folders} or "" in folders


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name))
def test_imports_run_downwards(name: str) -> None:
    if name in WINGS and MODULES[name].name == "__init__.py":
        return  # a wing's __init__.py exports what is in it
    is_init, package = MODULES[name].name == "__init__.py", name.rpartition(".")[0]
    for other in imported(name):
        assert is_init or not other or other != package, f"{name} imports from the __init__.py of its own package"
        if other:  # the package itself is lazy
            assert place(other) <= place(name), f"{name} imports {other}, which lies below it"


def test_the_plugin_for_vllm_imports_codes_and_kernels_alone() -> None:
    """headwise is installed beside vLLM without the packages that the rest of it needs."""
    for path in Path(headwise_vllm.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headwise."):
                assert str(node.module).startswith(("headwise.runtime.kernels", "headwise.runtime.quantization"))


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Every ``__init__.py`` is left out: a name that is imported through one comes from the module that has it."""
    graph = {
        name: {other for other in imported(name) if MODULES[other].name != "__init__.py"}
        for name in MODULES
        if MODULES[name].name != "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " → ".join((*above[above.index(name) :], name))
        if name in done:
            return
        for other in graph[name]:
            visit(other, (*above, name))
        done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name))
def test_functions_are_short(name: str) -> None:
    path = MODULES[name]
    file = path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef) or EXEMPT.get(file) == "a GPU kernel":
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
        length = (node.end_lineno or 0) - body[0].lineno + 1
        assert length <= LONGEST_BODY, f"{node.name} has {length} lines"
        arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        is_layer = file.startswith("runtime/attention/") and node.name == "__init__"
        if EXEMPT.keys() & {file, f"{file}:{node.name}"} or file.startswith("cli/") or is_layer:
            continue
        named = [one for one in arguments if one not in ("self", "cls")] + unpacked(node, name)
        assert len(named) <= MOST_PARAMETERS, node.name


def unpacked(function: ast.FunctionDef, module: str) -> list[str]:
    """The keywords behind a function's ``**keywords: Unpack[…]``."""
    annotation = function.args.kwarg and function.args.kwarg.annotation
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Unpack"):
        return []
    kind = getattr(importlib.import_module(f"headwise.{module}"), ast.unparse(annotation.slice))
    return list(kind.__annotations__)


def test_keywords_have_names() -> None:
    """Apart from those that are another function's, parameters are not hidden in ``**keywords``."""
    anything = set()
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.args.kwarg is not None:
                annotation = node.args.kwarg.annotation
                if annotation is None or ast.unparse(annotation) in ("Any", "object", "P.kwargs"):
                    anything.add(f"{path.relative_to(PACKAGE).as_posix()}:{node.name}")
    assert anything == FORWARDED.keys()


def test_keywords_in_a_dictionary_are_counted() -> None:
    hidden = ast.parse("def attend_with_weights(query, **options: Unpack[AttendOptions]) -> None: ...").body[0]
    assert isinstance(hidden, ast.FunctionDef)
    assert {"attn_mask", "window", "backend"} < {*unpacked(hidden, "runtime.kernels.attend")}


@pytest.mark.parametrize(
    ("heading", "block"),
    [("to a shard on disk", 1), ("One token through a cache", 1), ("One token through a cache", 3)],
)
def test_the_chains_in_the_document_name_functions_that_exist_each_once(heading: str, block: int) -> None:
    text = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    chain = text.partition(f"{heading}\n")[2].split("```")[block].strip().splitlines()
    assert len(chain) < 25
    names = [line.split()[0] for line in chain]
    assert len(set(names)) == len(names)
    for name in names:
        module, attribute = _split_module(name)
        target: object = importlib.import_module(f"headwise.{module}")
        for part in attribute.split("."):
            target = getattr(target, part)
        assert callable(target), name


def _split_module(name: str) -> tuple[str, str]:
    """A name's module and what follows it; names of parts of ``conversion`` leave that out."""
    for prefix in ("", "conversion."):
        parts = f"{prefix}{name}".split(".")
        for end in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:end]) in MODULES:
                return ".".join(parts[:end]), ".".join(parts[end:])
    raise AssertionError(f"{name} is in no module")


def test_the_places_that_contributing_names_exist() -> None:
    root = Path(__file__).parents[1]
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Changing something")[2]
    places = [name for name in re.findall(r"`([^`]+)`", text.partition("## Rules")[0]) if "/" in name]
    found = {
        name: [*root.glob(f"{name}*"), *root.glob(f"src/headwise/{name}*"), *root.glob(f"src/headwise/**/{name}")]
        for name in places
        if name != "src/headwise"
    }
    assert len(found) > 20
    assert [name for name, paths in found.items() if not paths] == []
