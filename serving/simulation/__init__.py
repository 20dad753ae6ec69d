"""A whole deployment in virtual time: the real schedulers, managers, loops and agents over a clock that is no clock."""
