"""One scrape: the families of every door and the cluster's samples in one text."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from serving.metrics.cluster_samples import ClusterSamples

CONTENT_TYPE = CONTENT_TYPE_LATEST


class _AllDoors:
    """A collector. The format wants all samples of a family together, and a family once."""

    def __init__(self, doors: Sequence[Sequence[Metric]]) -> None:
        self._doors = doors

    def collect(self) -> Iterable[Metric]:
        """Each family once, with the samples of all doors."""
        families: dict[str, Metric] = {}
        for door in self._doors:
            for family in door:
                whole = Metric(family.name, family.documentation, family.type)
                families.setdefault(family.name, whole).samples.extend(family.samples)
        return families.values()


def render(doors: Sequence[Sequence[Metric]], cluster: ClusterSamples) -> bytes:
    """Prometheus' text format; its type is `CONTENT_TYPE`.

    Args:
        doors: families of each door, whose labels tell them apart.
        cluster: everything else.
    """
    scrape = CollectorRegistry(auto_describe=False)
    scrape.register(_AllDoors(doors))
    scrape.register(cluster)
    return generate_latest(scrape)
