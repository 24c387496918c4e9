"""Checks of what estimators with the interface of scikit-learn are given: arrays, and steps that learned from them."""
