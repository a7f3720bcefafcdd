"""Where an adapter's bytes live on a node, one module a tier. What runs inside the engine may import these: stdlib
only.
"""
