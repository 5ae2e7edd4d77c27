"""One page of a model: a verdict, what it rests on, and controls that choose other answers. No torch here."""

from headwise.decide.report.page import DEFAULT_HARDWARE, ModelPart, page, page_data
from headwise.decide.report.sections import FolderResults, Section, measured_steps, read_folder, sections
