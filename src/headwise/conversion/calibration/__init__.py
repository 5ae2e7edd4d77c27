"""What a conversion knows of its source: a text run through it, saved statistics, or nothing."""
