"""Folders and files of stock models that engines load."""
