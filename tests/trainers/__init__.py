"""Trainers of several processes, each with the real framework that shards or wraps its model."""
