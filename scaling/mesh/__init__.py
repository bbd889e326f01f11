"""Meshes: devices arranged along named axes (Part 3, "A unified notation for sharding").

`meshes` has the two kinds, one that runs and one of sizes only; `page` is memory that the ranks of a mesh share to tell
each other what they are about to do, `futex` how they wait for each other in it.
"""

from scaling.mesh.meshes import TIMEOUT, AbstractMesh, Group, Mesh, join_world

__all__ = ["TIMEOUT", "AbstractMesh", "Group", "Mesh", "join_world"]
