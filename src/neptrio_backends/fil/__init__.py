"""backend: "fil": ensembles of decision trees (docs/trees.md).

model       the backend: parameters, auto-completion, batches
forest      what a file of trees holds, and its predictions
forest_files  finds and reads such files
"""
