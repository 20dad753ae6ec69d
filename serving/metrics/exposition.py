"""One scrape: the door's own registry and the cluster's samples in one text."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from serving.metrics.cluster_samples import ClusterSamples
from serving.metrics.stream_metrics import StreamMetrics

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(streams: StreamMetrics, cluster: ClusterSamples) -> bytes:
    """Prometheus' text format; its type is `CONTENT_TYPE`."""
    scrape = CollectorRegistry(auto_describe=False)
    scrape.register(cluster)
    return generate_latest(streams.registry) + generate_latest(scrape)
