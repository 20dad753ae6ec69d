"""`Switch`: the ways in which a scheduler that tries and sees comes apart from its manager, V1 to V20.

Each is the left column of `scheduler/DIVERGENCE.md`. `INERT` names those that change nothing in a run with
primary caches only and without exceptions inside the manager, and why: they are switched on all the same.
"""

from enum import Enum


class Switch(Enum):
    """One divergence, by its number."""

    V1 = "a prepared context keeps its claim and its index slot when it is not admitted"
    V2 = "a grown context keeps its pages when a later check fails"
    V3 = "a refused generation keeps its cache resumed"
    V4 = "an exception in the middle of a suspension leaves half of it"
    V5 = "a refused disaggregated init keeps what it prepared"
    V6 = "victims stay suspended for a request that still does not fit"
    V7 = "an exception after a self-suspension loses it from the lists"
    V8 = "suspending an absent or inactive cache is a silent no-op that counts as a suspension"
    V9 = "a context whose cross-attention pages are refused is suspended enlarged"
    V10 = "a failed resize suspends the cache on the first chunk and leaves it active on later ones"
    V11 = "a revert frees the cache outright when history has passed the rollback point"
    V12 = "a batch that cannot run keeps its context growth and its suspensions"
    V13 = "the budget counts logical tokens, not pages"
    V14 = "the budget is rebuilt from what the scheduler believes, not from the manager"
    V15 = "what failed attempts of contexts and inits kept never reaches the budget"
    V16 = "the budget does not see pages that a claim pins"
    V17 = "a refused generation keeps its cache resumed and the budget does not see it"
    V18 = "init does not reserve the first decode's place; it is taken after activation"
    V19 = "padding of drafts is invisible to the budget"
    V20 = "a suspended request keeps its adapter"


INERT = {
    Switch.V4: "needs an exception between the members of a cache set",
    Switch.V7: "needs an exception after the manager has suspended",
    Switch.V9: "the manager gives encoder output and growth in one call, so nothing can fail between them",
    Switch.V15: "needs what V1, V2 or V5 keep; acts together with them",
    Switch.V19: "needs drafts: see `WITH_MEMBERS`",
    Switch.V20: "needs adapters: see `WITH_MEMBERS`",
}

WITH_MEMBERS = frozenset({Switch.V19, Switch.V20})
"""Those of `INERT` that act where requests have drafts and adapters (`member_run.py`)."""

ALL = frozenset(Switch)
