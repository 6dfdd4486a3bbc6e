"""Checks a program against the rules of the lifecycle, one check a module."""

from .verifier import verify as verify
