"""What the chapters answer where the book gives no number, or a wrong or a rounded one, computed once more by hand.

{chapter: {question: value or word}}. Written out from the formulas with the numbers in place, without the project's own
functions: what a chapter computes by its library must come out the same.
"""

PINNED = {
    "01_roofline": {
        "1e12 FLOPs on a v6e with the 9.2e14 FLOPs/s of Part 2's table": 1e15 / 9.2e14,
        "Critical intensity of v5p's VPU": 8 * 128 * 4 * 1.75e9 / (2.8e12 / 2),
        "FLOPs/B of a matmul by tiles of 128 x 512 and 512 x 256": 2 * 128 * 256 * 2**20 / (
            2 * (2**20 * (128 + 256) + 128 * 256)
        ),
        "1.4 int8, B = 100, D = F = 4096: at least": 1e6 * (100 * 4096 + 4096 * 4096 + 100 * 4096) / 8.2e11,
        "1.4 at most": 1e6 * ((100 * 4096 + 4096 * 4096 + 100 * 4096) / 8.2e11 + 200 * 4096**2 / 3.94e14),
        "3 corner of the plot, D = F = 4096": 4096 / (2 * 4096 * 8.2e11 / 1.97e14 - 2 - 2) ,
        "3 corner of the plot, D = F = 1024": 1024 / (2 * 1024 * 8.2e11 / 1.97e14 - 2 - 2),
    },
}  # fmt: skip
