"""The search for pipelines: layouts of the whole model on parts of the cluster, items priced as
stages of their own, splits into stages, and the simulator.
"""
