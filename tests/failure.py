"""What the `ranks` fixture raises when a rank fails."""


class RankFailed(Exception):
    pass
