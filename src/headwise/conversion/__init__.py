"""A model's attention into another mechanism: plan, statistics, solve, write."""

from headwise.conversion.calibrate import Calibration, calibrate
from headwise.conversion.calibration.streams import STAGES
from headwise.conversion.convert import Conversion, convert
from headwise.conversion.output.deepseek import deepseek_config, deepseek_layer, export_deepseek, one_plan
from headwise.conversion.output.formats import FORMATS, StockReport
from headwise.conversion.planning.target import Target, parse_target, plan_layers
from headwise.conversion.solvers.grouped import convert_to_grouped
from headwise.conversion.solvers.joint_latent import joint_latent
from headwise.conversion.solvers.latent import convert_to_latent
from headwise.conversion.solvers.published import first_head, mha2mla, transmla
from headwise.conversion.solvers.rope_channels import Channels, concentrate, keep_rotation, mean_rotation
from headwise.renamed import moved_names

__all__ = [
    "FORMATS",
    "STAGES",
    "Calibration",
    "Channels",
    "Conversion",
    "StockReport",
    "Target",
    "calibrate",
    "concentrate",
    "convert",
    "convert_to_grouped",
    "convert_to_latent",
    "deepseek_config",
    "deepseek_layer",
    "export_deepseek",
    "first_head",
    "joint_latent",
    "keep_rotation",
    "mean_rotation",
    "mha2mla",
    "one_plan",
    "parse_target",
    "plan_layers",
    "transmla",
]

__getattr__ = moved_names(__name__, dict.fromkeys(("Frontier", "Point", "frontier"), "headwise.frontiers"))
