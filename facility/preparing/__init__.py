"""From text to blocks, in four steps: sources -> template and encoding -> packing -> a dataset directory."""
