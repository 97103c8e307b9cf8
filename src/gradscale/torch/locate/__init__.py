"""Locates where a value stopped being finite: module hooks, replay."""
