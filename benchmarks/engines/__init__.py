"""What headwise writes, run in the engines that people serve models with."""
