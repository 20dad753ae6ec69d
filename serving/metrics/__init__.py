"""What an operator's dashboards read: GET /metrics in Prometheus' text format.

`StreamMetrics` counts what one door sees; `ClusterSamples` turns the cluster's account of itself
(the same that GET /cluster/state shows) into samples, so that no count is kept twice.
"""

from serving.metrics.cluster_samples import ClusterSamples
from serving.metrics.exposition import CONTENT_TYPE, render
from serving.metrics.recent_latencies import RecentLatencies
from serving.metrics.stream_metrics import StreamMetrics

__all__ = ["CONTENT_TYPE", "ClusterSamples", "RecentLatencies", "StreamMetrics", "render"]
