"""Model folders and GGUF files, one tensor at a time."""

from headwise.models.checkpoints.checkpoint import (
    DTYPES,
    Checkpoint,
    TensorInfo,
    dtype_name,
    model_identity,
    run_identity,
    versions,
)
from headwise.models.checkpoints.folder import FolderCheckpoint
from headwise.models.checkpoints.gguf_reader import GgufCheckpoint
from headwise.models.checkpoints.gguf_tokenizer import tokenizer_fields
from headwise.models.checkpoints.gguf_writer import GGUF_TYPES, GgufFile
from headwise.models.checkpoints.open import model_path, open_checkpoint
from headwise.models.checkpoints.quantised import QuantisedFolder
from headwise.models.checkpoints.tokenizer import (
    chat_text,
    decode,
    load_tokenizer,
    max_length,
    refuse_other_tokens,
    tokenize,
)
from headwise.models.checkpoints.unsafe import refuse_kernel, refuse_kernels, refuse_other_weights, refuse_unsafe
from headwise.models.checkpoints.writer import FolderWriter, check_output, move_into_place
from headwise.models.families.base import family_names, family_of, has_family
