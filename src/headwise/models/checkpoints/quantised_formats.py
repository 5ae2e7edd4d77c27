"""Quantised matrices in safetensors: rows of codes with scales, and how each format stores them.

Every format's tensors become one kind of rows, which can be multiplied by powers of two and exchanged exactly,
because only their scales change. Of the config only that is read which the tensors do not say.

A format is told by its tensors' names, which stand behind the name of the module, and by ``quant_method``:

========================  ==================================================================================
tensors                   layout, and its source
========================  ==================================================================================
qweight, qzeros, scales   AWQ, version ``gemm``: ``[C, R/8]``, ``[G, R/8]`` int32 and ``[G, R]``. A word has
                          eight codes of 4 bits, of the outputs 0 2 4 6 1 3 5 7 from the lowest bits up.
                          AutoAWQ 0.2.9, ``awq/modules/linear/gemm.py``.
qweight, qzeros, scales,  GPTQ: ``[C·b/32, R]``, ``[G, R·b/32]`` int32, ``[G, R]`` and ``[C]``, each input's
g_idx                     group. Codes in order. Version 1 (``checkpoint_format`` ``gptq``) stores zeros less
                          one, ``gptq_v2`` as they are. GPTQModel 7.7, ``nn_modules/qlinear/__init__.py``.
weight_packed,            compressed-tensors, ``pack-quantized``: ``[R, C·b/32]`` int32, ``[R, G]``, ``[2]``,
weight_scale,             ``[R·b/32, G]``: zeros are packed along rows. Signed codes, plus 2ᵇ⁻¹.
weight_shape,             compressed-tensors 0.20, ``compressors/pack_quantized``.
weight_zero_point
weight, weight_scale (or  One code a byte, int8 or float8_e4m3fn: compressed-tensors' ``int-quantized`` and
weight_scale_inv),        ``float-quantized``, and ``quant_method`` ``fp8``. Scales of a tensor, of rows
weight_zero_point         ``[R, 1]``, of groups ``[R, G]``, or of blocks. transformers 5.23,
                          ``integrations/finegrained_fp8.py``: ``scale_inv`` multiplies, in spite of its name.
========================  ==================================================================================

Shapes: R rows (output channels), C columns (input channels), G groups of columns, b bits of a code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.errors import CheckpointError

_SIGN = 0x80
"""The bit of an 8-bit float that is its sign."""


@dataclass(frozen=True, eq=False)
class Rows:
    """A matrix ``(codes − zeros) · scales``, by rows, whatever the format that stores it.

    Attributes:
        codes: int16 ``[R, C]``; of floats, their bits, uint8.
        scales: ``[R, G]`` in the dtype that they are stored in; ``[⌈R / rows_per_scale⌉, G]`` where rows share them.
        groups: int64 ``[C]``, the group of each column.
        zeros: int16 ``[R, G]``, the codes that mean 0; None where that is code 0.
        ends: the sum of the least and the largest code of a format that stores zeros, so that a row is negated by
            taking codes and zeros from it; None where zeros are fixed, and a negative row has no codes.
        rows_per_scale: rows that share a scale.
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor
    zeros: Tensor | None = None
    ends: int | None = None
    rows_per_scale: int = 1

    @property
    def is_float(self) -> bool:
        """Whether codes are 8-bit floats."""
        return self.codes.dtype == torch.uint8

    @property
    def can_turn(self) -> bool:
        """Whether codes can say that a row is negated. Scales are left positive: vLLM's Marlin kernel with int8
        activations reads them as unsigned (vllm-project/vllm#48905)."""
        return self.is_float or (self.zeros is not None and self.ends is not None)

    def row_scales(self) -> Tensor:
        """The scales of each row, ``[R, G]``."""
        return self.scales.repeat_interleave(self.rows_per_scale, 0)[: len(self.codes)]

    def weight(self) -> Tensor:
        """The matrix in float32, ``[R, C]``.

        It is exact but where a scale has more than 16 bits, where products are rounded as transformers rounds them.
        """
        values = self.codes.view(torch.float8_e4m3fn).float() if self.is_float else self.codes.float()
        if self.zeros is not None:
            values = values - self.zeros.float()[:, self.groups]
        return values * self.row_scales().float()[:, self.groups]

    def multiplied(self, factors: Tensor) -> Rows:
        """The matrix with each row times ``factors[row]``; codes and zeros stay.

        Args:
            factors: float64 ``[R]``.
        """
        assert self.rows_per_scale == 1
        return replace(self, scales=(self.scales.double() * factors[:, None]).to(self.scales.dtype))

    def taken(self, order: Tensor, signs: Tensor) -> Rows:
        """The matrix with row ``order[r]`` in the place of row r, times ``signs[r]``.

        Args:
            order: int64 ``[R]``.
            signs: int64 ``[R]``, each 1 or −1; all 1 unless `can_turn`.
        """
        assert self.rows_per_scale == 1
        codes, zeros = self.codes[order], None if self.zeros is None else self.zeros[order]
        negated = (signs < 0)[:, None]
        if bool(negated.any()):
            assert self.can_turn
            if self.is_float:
                codes = torch.where(negated, codes ^ _SIGN, codes)
            elif zeros is not None and self.ends is not None:
                codes = torch.where(negated, self.ends - codes, codes)
                zeros = torch.where(negated, self.ends - zeros, zeros)
        return replace(self, codes=codes, scales=self.scales[order], zeros=zeros)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes in 32-bit integers, the lowest bits first: int16 ``[…, n · 32 / b]`` of int32 ``[…, n]``.

    For example ``unpacked(torch.tensor([0x76543210], dtype=torch.int32), 4)`` is ``0 … 7``.

    Args:
        words: the 32-bit integers to unpack along the last dimension.
        bits: the bits of a code; a divisor of 32.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.to(torch.int16).flatten(-2)


def packed(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `unpacked`; the last integer is filled up with zeros.

    Args:
        codes: ``[…, n]`` from 0 to 2ᵇ − 1.
        bits: the bits of a code; a divisor of 32.
    """
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % each))
    words: Tensor = torch.unflatten(codes, -1, (-1, each)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32)  # the upper half of the range becomes negative


Parts = Mapping[str, Tensor]
"""The tensors of a module by their own names, such as ``scales``."""

BESIDES = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")
"""What a module may store of its inputs, which stay as they are."""

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The place of each of eight outputs in a word of AWQ's."""


@dataclass(frozen=True)
class Format(ABC):
    """How the tensors of a module store a matrix.

    Attributes:
        module: the name of the module, for errors.
    """

    module: str

    @abstractmethod
    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> tuple[int, int]:
        """The rows and columns of the matrix.

        Args:
            shapes: the shapes of the module's tensors, by name.
            read: returns one of them.

        Raises:
            CheckpointError: the tensors do not fit together.
        """

    def sharing(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """How many rows share a scale.

        Args:
            shapes: the shapes of the module's tensors, by name.
        """
        return 1

    @abstractmethod
    def read(self, parts: Parts) -> Rows:
        """The rows of the matrix.

        Raises:
            CheckpointError: the tensors do not fit together.
        """

    @abstractmethod
    def written(self, rows: Rows, parts: Parts) -> dict[str, Tensor]:
        """The tensors that store rows: the inverse of `read`, bit by bit.

        Args:
            rows: the rows to store, of the same sizes as those of ``parts``.
            parts: the tensors as they were.
        """

    def matrix(self, part: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """The sizes of a tensor of two dimensions.

        Raises:
            CheckpointError: the tensor does not have two dimensions.
        """
        if len(shape) != 2 or not all(shape):
            raise self.refuse(part, shape, "must be the shape of a matrix")
        return shape[0], shape[1]

    def refuse(self, part: str, value: object, rule: str) -> CheckpointError:
        """An error that names a tensor of the module."""
        return CheckpointError(f"{self.module}.{part}", value, rule)

    def groups(self, parts: Parts, part: str, columns: int, groups: int, scale: str) -> Tensor:
        """The group of each column, int64 ``[C]``: as a tensor says, where it is there, or groups of one size.

        Raises:
            CheckpointError: the tensor names groups that do not exist, or groups of one size do not divide the
                columns.
        """
        if part not in parts:
            return self.even_groups(columns, groups, scale)
        self.check(parts, part, (columns,))
        given = parts[part].long()
        if int(given.min()) < 0 or int(given.max()) >= groups:
            raise self.refuse(part, int(given.max()), f"must be numbers of {groups} groups")
        return given

    def even_groups(self, columns: int, groups: int, scale: str) -> Tensor:
        """The group of each column, int64 ``[C]``, of groups of one size.

        Raises:
            CheckpointError: the groups do not divide the columns.
        """
        if not groups or columns % groups:
            raise self.refuse(scale, groups, f"must have scales of a divisor of {columns} columns")
        return torch.arange(columns) // (columns // groups)

    def check(self, parts: Parts, part: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that has another shape.

        Raises:
            CheckpointError: the tensor has another shape.
        """
        if tuple(parts[part].shape) != shape:
            raise self.refuse(part, tuple(parts[part].shape), f"must be {shape} by the tensors beside it")


class Awq(Format):
    """AWQ's version ``gemm``."""

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> tuple[int, int]:
        """See `Format`."""
        (C, words), (_, R) = (self.matrix(name, shapes[name]) for name in ("qweight", "scales"))
        if words * 8 != R:
            raise self.refuse("qweight", (C, words), f"must have 4 bits of each of {R} outputs")
        return R, C

    def read(self, parts: Parts) -> Rows:
        """See `Format`."""
        (C, words), (G, _) = parts["qweight"].shape, parts["scales"].shape
        self.check(parts, "qzeros", (G, words))
        codes, zeros = (_awq_codes(parts[name]).T for name in ("qweight", "qzeros"))
        return Rows(codes, parts["scales"].T, self.even_groups(C, G, "scales"), zeros, ends=15)

    def written(self, rows: Rows, parts: Parts) -> dict[str, Tensor]:
        """See `Format`."""
        assert rows.zeros is not None
        words = {name: _awq_words(each.T) for name, each in (("qweight", rows.codes), ("qzeros", rows.zeros))}
        return {**words, "scales": rows.scales.T}


def _awq_codes(words: Tensor) -> Tensor:
    return torch.unflatten(unpacked(words, 4), -1, (-1, 8))[..., _AWQ_PLACES].flatten(-2)


def _awq_words(codes: Tensor) -> Tensor:
    places = torch.tensor(_AWQ_PLACES).argsort()
    return packed(torch.unflatten(codes, -1, (-1, 8))[..., places].flatten(-2), 4)


@dataclass(frozen=True)
class Gptq(Format):
    """GPTQ's two versions.

    Attributes:
        less: the number that is subtracted from zero points before they are stored: 1, or 0 in version 2.
    """

    less: int

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> tuple[int, int]:
        """See `Format`."""
        (_, words), (_, R), (packed, _) = (
            self.matrix(name, shapes[name]) for name in ("qzeros", "scales", "qweight")
        )
        bits = 32 * words // R
        if bits not in (2, 4, 8) or bits * R != 32 * words:
            raise self.refuse("qzeros", shapes["qzeros"], f"must have 2, 4 or 8 bits of each of {R} outputs")
        return R, packed * 32 // bits

    def read(self, parts: Parts) -> Rows:
        """See `Format`."""
        (G, R), words = parts["scales"].shape, parts["qzeros"].shape[-1]
        bits = 32 * words // R
        codes = unpacked(parts["qweight"].T, bits)
        self.check(parts, "qweight", (len(parts["qweight"]), R))
        self.check(parts, "qzeros", (G, words))
        # Engines disagree on a zero of 2ᵇ in version 1: AutoGPTQ computes with 0, ExLlama with 2ᵇ. Scales may change
        # for both.
        zeros = (unpacked(parts["qzeros"], bits) + self.less) & (2**bits - 1)
        groups = self.groups(parts, "g_idx", codes.shape[-1], G, "scales")
        return Rows(codes, parts["scales"].T, groups, zeros.T)

    def written(self, rows: Rows, parts: Parts) -> dict[str, Tensor]:
        """See `Format`; without turns, codes and zeros are the same."""
        return {**parts, "scales": rows.scales.T}


class Packed(Format):
    """compressed-tensors' ``pack-quantized``."""

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> tuple[int, int]:
        """See `Format`."""
        if len(sizes := read("weight_shape").flatten().tolist()) != 2:
            raise self.refuse("weight_shape", sizes, "must be two numbers")
        R, words = self.matrix("weight_packed", shapes["weight_packed"])
        if sizes[0] != R or _bits(sizes[1], words) is None:
            rule = f"must have 2, 4 or 8 bits of each number of {sizes[0]} × {sizes[1]}"
            raise self.refuse("weight_packed", (R, words), rule)
        return R, sizes[1]

    def sharing(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `Format`."""
        R, _ = self.matrix("weight_packed", shapes["weight_packed"])
        return 1 if math.prod(shapes["weight_scale"]) > 1 else R

    def read(self, parts: Parts) -> Rows:
        """See `Format`."""
        R, C = parts["weight_shape"].flatten().tolist()
        scales = parts["weight_scale"]
        if scales.numel() != 1 and (scales.ndim != 2 or len(scales) != R):
            raise self.refuse("weight_scale", tuple(scales.shape), f"must be of {R} rows, or one")
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        bits = _bits(C, parts["weight_packed"].shape[-1]) or 0
        middle, G = 2 ** (bits - 1), scales.shape[1]
        groups = self.groups(parts, "weight_g_idx", C, G, "weight_scale")
        zeros = None
        if "weight_zero_point" in parts:
            self.check(parts, "weight_zero_point", (-(-R * bits // 32), G))
            zeros = unpacked(parts["weight_zero_point"].T, bits)[:, :R].T - middle
        codes = unpacked(parts["weight_packed"], bits)[:, :C] - middle
        return Rows(codes, scales, groups, zeros, _signed_ends(zeros), rows_per_scale=R // len(scales))

    def written(self, rows: Rows, parts: Parts) -> dict[str, Tensor]:
        """See `Format`."""
        bits = _bits(rows.codes.shape[-1], parts["weight_packed"].shape[-1]) or 0
        middle = 2 ** (bits - 1)
        new = {**parts, "weight_packed": packed(rows.codes + middle, bits)}
        new["weight_scale"] = rows.scales.reshape(parts["weight_scale"].shape)
        if rows.zeros is not None:
            new["weight_zero_point"] = packed((rows.zeros + middle).T, bits).T
        return new


def _bits(columns: int, words: int) -> int | None:
    """The bits of a code, from a row's codes and 32-bit integers; None where no number of bits fits."""
    return next((bits for bits in (2, 4, 8) if -(-columns * bits // 32) == words), None)


@dataclass(frozen=True)
class Whole(Format):
    """One code a byte.

    Attributes:
        scale: the name of the scales.
        block: rows and columns that share a scale, where the config says that blocks do.
    """

    scale: str
    block: tuple[int, int] | None

    def shape(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> tuple[int, int]:
        """See `Format`."""
        return self.matrix("weight", shapes["weight"])

    def sharing(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """See `Format`."""
        (R, C), scale = self.matrix("weight", shapes["weight"]), shapes[self.scale]
        if math.prod(scale) == 1:
            return R
        return self.block[0] if self.block is not None and scale == self._blocks(R, C) else 1

    def _blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """The blocks of a matrix down and across, where there are such."""
        down, across = self.block or (rows, columns)
        return -(-rows // down), -(-columns // across)

    def read(self, parts: Parts) -> Rows:
        """See `Format`."""
        weight, scales = parts["weight"], parts[self.scale]
        R, C = weight.shape
        rows = self.sharing({name: tuple(tensor.shape) for name, tensor in parts.items()})
        is_float = weight.dtype == torch.float8_e4m3fn
        codes = weight.view(torch.uint8) if is_float else weight.to(torch.int16)
        zeros = parts.get("weight_zero_point")
        if self.block is not None and tuple(scales.shape) == self._blocks(R, C):
            groups = torch.arange(C) // self.block[1]
        elif scales.numel() == 1 or len(scales) == R:
            groups = self.even_groups(C, scales.numel() // (R // rows), self.scale)
        else:
            rule = f"must be of {R} rows, of one, or of the blocks that the config names"
            raise self.refuse(self.scale, tuple(scales.shape), rule)
        scales = scales.reshape(-(-R // rows), -1)
        if zeros is not None:
            if zeros.numel() != scales.numel():
                raise self.refuse("weight_zero_point", tuple(zeros.shape), f"must be {tuple(scales.shape)}")
            zeros = zeros.reshape(scales.shape).to(torch.int16).repeat_interleave(rows, 0)[:R]
        return Rows(codes, scales, groups, zeros, _signed_ends(zeros), rows)

    def written(self, rows: Rows, parts: Parts) -> dict[str, Tensor]:
        """See `Format`."""
        codes = rows.codes.view(torch.float8_e4m3fn) if rows.is_float else rows.codes.to(parts["weight"].dtype)
        new = {**parts, "weight": codes, self.scale: rows.scales.reshape(parts[self.scale].shape)}
        if rows.zeros is not None:
            zeros = parts["weight_zero_point"]
            new["weight_zero_point"] = rows.zeros.reshape(zeros.shape).to(zeros.dtype)
        return new


def _signed_ends(zeros: Tensor | None) -> int | None:
    """The sum of the ends of signed codes; None where all zeros are code 0, which engines may take for granted."""
    return None if zeros is None or not bool(zeros.any()) else -1


@dataclass(frozen=True)
class Scheme:
    """What a ``quantization_config`` says beside the tensors themselves.

    Attributes:
        method: ``awq``, ``gptq``, ``compressed-tensors`` or ``fp8``.
        less: the number that GPTQ has subtracted from zero points.
        block: rows and columns that share a scale; None where blocks do not.
    """

    method: str
    less: int = 0
    block: tuple[int, int] | None = None

    def format(self, module: str, parts: Mapping[str, torch.dtype]) -> tuple[Format, tuple[str, ...]] | None:
        """The format of a module, and the names of its tensors; None where its weight is not quantised.

        Args:
            module: the name of the module.
            parts: the dtypes of its tensors by their names within the module.

        Raises:
            CheckpointError: the module's tensors are those of no format that is read.
        """
        form: Format
        optional: tuple[str, ...]
        if "qweight" in parts and self.method in ("awq", "gptq"):
            needed = {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": _FLOATS}
            form, optional = (Awq(module), ()) if self.method == "awq" else (Gptq(module, self.less), ("g_idx",))
        elif "weight_packed" in parts:
            needed = {"weight_packed": (torch.int32,), "weight_scale": _FLOATS, "weight_shape": _INTEGERS}
            form, optional = Packed(module), ("weight_zero_point", "weight_g_idx")
        elif scale := next((name for name in ("weight_scale", "weight_scale_inv") if name in parts), None):
            needed = {"weight": (torch.int8, torch.float8_e4m3fn), scale: (*_FLOATS, torch.float8_e8m0fnu)}
            form, optional = Whole(module, scale, self.block), ("weight_zero_point",)
        else:
            return None
        for name, dtypes in needed.items():
            if name not in parts:
                raise CheckpointError("tensor", f"{module}.{name}", "is missing")
            if parts[name] not in dtypes:
                wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise CheckpointError(f"{module}.{name} dtype", str(parts[name]), f"must be {wanted}")
        return form, (*needed, *(name for name in optional if name in parts))


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)
_METHODS = ("awq", "gptq", "compressed-tensors", "fp8")
_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


def read_scheme(given: object) -> Scheme:
    """Read a ``quantization_config``.

    For example ``read_scheme({"quant_method": "gptq", "bits": 4}).less`` is 1.

    Raises:
        CheckpointError: weights are stored in another layout, or what their projections return is rounded too.
    """
    if not isinstance(given, Mapping):
        raise _refusal("type", type(given).__name__, "must be an object")
    method = given.get("quant_method")
    if method not in _METHODS:
        raise _refusal("quant_method", method, f"weights are read of {', '.join(_METHODS)}")
    if given.get("kv_cache_scheme"):
        rule = "has scales of a cache, which were measured on its keys: prepare the model before it is quantised"
        raise _refusal("kv_cache_scheme", given["kv_cache_scheme"], rule)
    if method == "awq":
        _only(given, ("version", "format"), "gemm", ("gemm",))
        _only(given, ("backend",), "auto", ("auto", "autoawq"))
        _only(given, ("zero_point",), True, (True,))
        return Scheme("awq")
    if method == "gptq":
        _only(given, ("is_marlin_format",), False, (False,))
        version = _only(given, ("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"))
        return Scheme("gptq", less=1 if version == "gptq" else 0)
    if method == "fp8":
        return Scheme("fp8", block=_block("weight_block_size", given.get("weight_block_size")))
    return _compressed(given)


def _compressed(given: Mapping[str, Any]) -> Scheme:
    _only(given, ("quantization_status",), "compressed", ("compressed",))
    _only(given, ("format",), "dense", _LAYOUTS)
    if given.get("transform_config"):
        raise _refusal("transform_config", given["transform_config"], "turns what layers compute while they run")
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise _refusal("sparsity_config", sparsity, "must be an object")
    if sparsity:
        _only(sparsity, ("format",), "dense", ("dense",))
    groups = given.get("config_groups") or {}
    blocks = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping):
            raise _refusal("config_groups", groups, "must be objects")
        _only(group, ("format",), "dense", _LAYOUTS)
        if group.get("output_activations"):
            rule = "rounds what projections return, by scales that were measured on it"
            raise _refusal("output_activations", group["output_activations"], rule)
        weights = group.get("weights")
        if isinstance(weights, Mapping) and weights.get("strategy") == "block":
            blocks.add(_block("block_structure", weights.get("block_structure")))
    if len(blocks) > 1:
        raise _refusal("block_structure", sorted(map(str, blocks)), "must be the same in all groups")
    return Scheme("compressed-tensors", block=next(iter(blocks), None))


def _only(given: Mapping[str, Any], fields: tuple[str, ...], absent: object, allowed: tuple[object, ...]) -> object:
    """The first of several fields that is there, in small letters; refused where it is none of those allowed."""
    field = next((field for field in fields if given.get(field) is not None), None)
    value = absent if field is None else given[field]
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed:
        raise _refusal(str(field), value, f"weights are read only where it is {', '.join(map(str, allowed))}")
    return value


def _block(field: str, value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)
    if not is_pair:
        raise _refusal(field, value, "must be two positive whole numbers")
    assert isinstance(value, list)
    return value[0], value[1]


def _refusal(field: str, value: object, rule: str) -> CheckpointError:
    return CheckpointError(f"quantization_config.{field}", value, rule)
