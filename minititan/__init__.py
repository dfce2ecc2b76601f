"""minititan: every parallelism technique of large-scale LLM training, one file each.

Nothing is imported here, so that one technique can be imported, or copied away, without the others.
"""

__version__ = "0.1.0"
