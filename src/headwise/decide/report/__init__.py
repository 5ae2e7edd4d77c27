"""One page of a model: a verdict, what it rests on, and controls that compute it again. No torch here."""

from headwise.decide.report.folder import FolderResults, read_folder
from headwise.decide.report.measured_steps import measured_steps
from headwise.decide.report.page import DEFAULT_HARDWARE, page
from headwise.decide.report.page_data import page_data
from headwise.decide.report.sections import Section, sections

__all__ = [
    "DEFAULT_HARDWARE",
    "FolderResults",
    "Section",
    "measured_steps",
    "page",
    "page_data",
    "read_folder",
    "sections",
]
