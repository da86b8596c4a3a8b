"""Answers under constraints: are they valid?"""
