"""Which slots are free: the manager's own bookkeeping."""
