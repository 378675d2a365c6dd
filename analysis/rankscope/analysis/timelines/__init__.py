"""What-if replay of a pipeline-parallel job from the timeline of its operations.

`timeline.read_columns` checks a table of operations, `report.analyze` replays it and reaches a verdict. Nothing here
opens a file."""
