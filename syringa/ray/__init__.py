"""Replicas on several machines. Ray places them and watches the nodes, and never carries a token.

Only this package imports Ray.
"""
