"""Download models from the Hugging Face hub, where a user names one as ``hf://owner/name``."""

from __future__ import annotations

from pathlib import Path

from headwise.errors import ArgumentError, CheckpointError

_FILES = ("*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files of a repository that are downloaded: no code and no pickles."""


def fetch_hub(name: str, *, config_only: bool = False) -> Path:
    """Download a model that the user named as ``hf://owner/name``: safetensors, configs and tokenizers.

    For example ``fetch_hub("hf://owner/name", config_only=True)``.

    Args:
        name: ``hf://owner/name`` or ``hf://owner/name@revision``.
        config_only: download ``config.json`` alone.

    Returns:
        The local folder, or the local ``config.json`` with ``config_only``.

    Raises:
        ArgumentError: the name has another form.
        CheckpointError: the download failed.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    repository, _, revision = name.removeprefix("hf://").partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ArgumentError("source", name, "a hub model is written hf://owner/name or hf://owner/name@revision")
    kwargs = {"revision": revision or None}
    try:
        if config_only:
            return Path(hf_hub_download(repository, "config.json", **kwargs))
        # Subfolders are left out, because some repositories repeat the weights there in another layout.
        return Path(snapshot_download(repository, allow_patterns=list(_FILES), ignore_patterns=["*/*"], **kwargs))
    except Exception as error:  # the hub client raises many kinds of exceptions: network, not found, gated
        raise CheckpointError("source", name, f"could not be fetched: {type(error).__name__}: {error}") from None
