"""Memory that holds slots, per tier, and the engine that copies between them."""
