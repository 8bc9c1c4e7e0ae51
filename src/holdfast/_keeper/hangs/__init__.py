"""Hang detection: is a step due, and does any rank still make progress?"""
