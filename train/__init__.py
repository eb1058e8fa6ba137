"""The training job: configuration, data, the loop, checkpoints, tracking and the precision comparison."""
