"""What several rooms use and no reader asks for: checks of numbers, the terminal, tables, lazy names, private torch."""
