"""Convert a model's attention into another mechanism: plan, calibrate, solve, write, prove."""

from headwise.conversion.calibrate import Calibration, calibrate
from headwise.conversion.convert import convert
from headwise.conversion.methods import STAGES, Method, all_methods, find_method
from headwise.conversion.methods.first_head import first_head
from headwise.conversion.methods.mha2mla import mha2mla
from headwise.conversion.methods.repeat import convert_to_grouped
from headwise.conversion.methods.transmla import transmla
from headwise.conversion.output.formats import FORMATS, StockReport
from headwise.conversion.report import Conversion
from headwise.conversion.solvers.joint_latent import joint_latent
from headwise.conversion.solvers.latent import convert_to_latent
from headwise.conversion.solvers.layer import LayerTarget
from headwise.conversion.solvers.rope_channels import Channels, concentrate, keep_rotation, mean_rotation
from headwise.costs.formulas.target import Target, convert_spec, parse_target
from headwise.serving.exports.deepseek import common_spec, deepseek_config, deepseek_layer, export_deepseek
from headwise.serving.exports.gguf import export_gguf
