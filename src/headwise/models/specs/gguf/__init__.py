"""GGUF: the header of a file, the config that it stands for, and the metadata that a config is written as."""
