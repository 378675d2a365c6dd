"""What-if replay of a pipeline-parallel job from the timeline of its operations.

`columns.read_columns` checks a table of operations, `analyzing.analyze` replays it and reaches a verdict. Pure: files
are the caller's business.
"""
