"""What is measured: texts, models beside their references, times of machines."""
