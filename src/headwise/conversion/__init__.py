"""A model's attention into another mechanism: plan, statistics, solve, write."""

from headwise.conversion.convert import Conversion, convert
from headwise.conversion.deepseek import deepseek_config, deepseek_layer, export_deepseek, one_plan
from headwise.conversion.formats import FORMATS, StockReport
from headwise.conversion.frontier import frontier
from headwise.conversion.grouped import convert_to_grouped
from headwise.conversion.joint_latent import joint_latent
from headwise.conversion.latent import convert_to_latent
from headwise.conversion.plan import Target, parse_target, plan_layers
from headwise.conversion.points import Frontier, Point
from headwise.conversion.published import first_head, mha2mla, transmla
from headwise.conversion.rope_channels import Channels, concentrate, keep_rotation, mean_rotation
from headwise.conversion.sequential import STAGES
from headwise.conversion.study import Calibration, calibrate

__all__ = [
    "FORMATS",
    "STAGES",
    "Calibration",
    "Channels",
    "Conversion",
    "Frontier",
    "Point",
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
    "frontier",
    "joint_latent",
    "keep_rotation",
    "mean_rotation",
    "mha2mla",
    "one_plan",
    "parse_target",
    "plan_layers",
    "transmla",
]
