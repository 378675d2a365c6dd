"""What-if replay of a pipeline-parallel job from the timeline of its operations."""
