"""Reports of costs: one model (`inspect`), mechanisms side by side (`compare`), one layer by stage (`complexity`)."""
