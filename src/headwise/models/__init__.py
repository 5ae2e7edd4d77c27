"""What a layer and a model are, and how their files are read and written."""
