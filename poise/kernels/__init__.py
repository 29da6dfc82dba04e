"""Implementations of the operator: blockwise (torch operations, any device) and cpu (C++), reached through ops."""
