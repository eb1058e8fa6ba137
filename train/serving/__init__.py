"""Scoring with what `train.commands.export` wrote. Nothing here needs the trainer or TorchRec."""
