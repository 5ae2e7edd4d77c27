"""Texts as windows of tokens: their sources, mixtures to calibrate on, passages that two texts share."""

from headwise.measure.texts.calibration import (
    NO_TEXTS,
    CalibrationTexts,
    calibration_windows,
    check_texts,
    hold_out,
    open_windows,
    refuse_cross_layers,
    refuse_unknown_tokens,
    windows_beyond,
)
from headwise.measure.texts.sample import Sample, sample
from headwise.measure.texts.sources import (
    language_reference,
    named_texts,
    read_jsonl,
    read_source,
    read_text,
    reference_topics,
    refuse_inputs_within,
    refuse_twice,
    text_identity,
    write_reference_texts,
)
from headwise.measure.texts.windows import (
    cut_windows,
    default_window,
    ending_ids,
    first_ids,
    overlap_note,
    passages_apart,
    put_begin_before,
    shared_fraction,
    shared_tokens,
    token_ids,
    token_windows,
    wrapping_ids,
)
