"""Metrics of our own: accumulated on the device without host syncs, global over ranks, per task."""

from train.metrics.auc import auc, auprc, segment_auc, streaming_auc, streaming_auc_bound, xauc
from train.metrics.bootstrap import Interval, metric_intervals, paired_gaps
from train.metrics.calibration import CalibrationCurve, calibration_curve
from train.metrics.collection import MetricSet
from train.metrics.gauc import gauc, gauc_means
from train.metrics.histogram import ScoreHistogram, score_histogram
from train.metrics.ne import binary_entropy, log_loss, normalized_entropy, recalibrated_log_loss
from train.metrics.ranking import ranking_names, ranking_sums
from train.metrics.throughput import Throughput, history_lengths, history_sums, peak_flops

__all__ = [
    "CalibrationCurve",
    "Interval",
    "MetricSet",
    "ScoreHistogram",
    "Throughput",
    "auc",
    "auprc",
    "binary_entropy",
    "calibration_curve",
    "gauc",
    "gauc_means",
    "history_lengths",
    "history_sums",
    "log_loss",
    "metric_intervals",
    "normalized_entropy",
    "paired_gaps",
    "peak_flops",
    "ranking_names",
    "ranking_sums",
    "recalibrated_log_loss",
    "score_histogram",
    "segment_auc",
    "streaming_auc",
    "streaming_auc_bound",
    "xauc",
]
