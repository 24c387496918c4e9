"""Smooth clipping for evenhand."""
