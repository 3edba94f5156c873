"""Scoring functions that stand alone: text in, numbers out."""
