"""Meshes: devices arranged along named axes (Part 3, "A unified notation for sharding").

A mesh gives its axes names and sizes. A `Mesh` (in `meshes`) runs: this process is one of its ranks. An `AbstractMesh`
(in `abstract`) has only sizes, and its arrays are meta tensors. Both have views: `mesh.stacked("L")` reads a line for
stacked arrays, `mesh.optional` lets a line name axes that the mesh lacks, `mesh.without("C")` leaves one axis out, and
`mesh.sliced` lets a line leave out the axes along which nothing is sent.
In `meeting` the ranks of a group compare their next calls, through the shared memory of `page`.
"""

from scaling.mesh.abstract import AbstractMesh, Group
from scaling.mesh.meshes import TIMEOUT, Mesh, check_device, join_world

__all__ = ["TIMEOUT", "AbstractMesh", "Group", "Mesh", "check_device", "join_world"]
