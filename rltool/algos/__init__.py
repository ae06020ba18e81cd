"""The algorithms: one file each, holding the equations, the build and the update."""
