"""Methods to convert a layer: headwise's own, and the baselines it is compared with, one file each.

A file of this folder that assigns ``METHOD`` is a method; nothing else lists them.
"""

from headwise.base.options import STAGES
from headwise.conversion.methods.base import Evidence, LatentMethod, Method, all_methods, choose_method, find_method
