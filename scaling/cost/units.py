"""Format numbers for people."""


def significant(number: float) -> str:
    """Format four significant digits, with an exponent that is a multiple of three up to 1e14: 13.02e9, 0.9151."""
    if number == 0:
        return "0"
    exponent = int(f"{number:e}".partition("e")[2])
    third = 0 if -3 <= exponent < 6 else exponent if abs(exponent) > 14 else exponent - exponent % 3
    scaled = number / 10**third
    text = f"{scaled:,.{max(0, 3 - (exponent - third))}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text + (f"e{third}" if third else "")
