"""Requests, blocks, scheduling, steps and outputs."""
