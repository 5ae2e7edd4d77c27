"""One page of a model: a verdict, what it rests on, and controls that compute it again. No torch here."""

from headwise.report.folder import FolderResults, read_folder
from headwise.report.measured_steps import measured_steps
from headwise.report.page import DEFAULT_HARDWARE, page, refuse_no_plotly
from headwise.report.page_data import page_data
from headwise.report.sections import Section, sections

__all__ = [
    "DEFAULT_HARDWARE",
    "FolderResults",
    "Section",
    "measured_steps",
    "page",
    "page_data",
    "read_folder",
    "refuse_no_plotly",
    "sections",
]
