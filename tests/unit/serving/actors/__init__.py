"""Tests of serving.actors, without Ray."""
